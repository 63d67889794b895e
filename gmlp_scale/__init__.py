"""Masked-language-model pretraining and finetuning of gMLP, aMLP and the encoders they are compared with."""

__version__ = "0.1.0"
