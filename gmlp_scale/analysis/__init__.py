"""Studies trained models: held-out perplexity, a finetuning probe, filled masks, pictures of what they learned."""
