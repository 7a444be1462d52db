"""New weights into running engines: the publisher, one module a transport, the canary, and the lock of an
engine's weights."""
