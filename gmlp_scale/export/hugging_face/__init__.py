"""What every export carries along: code that needs torch and transformers, and of this package only the models, which
are copied beside it (see gmlp_scale/export/sources.py)."""
