"""Messages to tokens and back: chat templates, and renderers that never tokenize a sampled token again."""
