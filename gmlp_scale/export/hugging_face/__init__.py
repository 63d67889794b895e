"""The code that every export carries along. It needs torch and transformers, and of this package only the modules that
gmlp_scale/export/folder.py copies beside it."""
