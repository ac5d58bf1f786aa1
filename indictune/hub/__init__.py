"""What is published on the Hub: the model card and the push."""
