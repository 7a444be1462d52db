"""The HTTP server of the training server, of agent programs and of tests, and the bounds that all our servers share."""
