"""A model as a Hugging Face folder: written from a run or a finetuned model (folder), and read back to finetune."""
