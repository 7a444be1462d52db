"""SGLang's servers: their start, the check that they can serve training, and the dialect that the client speaks to
them."""
