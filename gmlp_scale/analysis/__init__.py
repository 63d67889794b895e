"""What is asked of trained models: held-out perplexity, a finetuning probe, and pictures of what they learned."""
