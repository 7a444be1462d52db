"""What a Python user hangs into a run: callbacks, the events they are told of, early stopping, trackers."""
