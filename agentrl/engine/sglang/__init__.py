"""SGLang's servers: the dialect that the client speaks to them, and what one must have for training."""
