"""The HTTP server of gateways, of agent programs and of tests, and the bounds that all our servers share."""
