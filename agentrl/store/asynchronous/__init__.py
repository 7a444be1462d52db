"""The store in an asynchronous program: awaited writes committed together, reads beside the loop, waiting for work."""
