"""Callbacks for Python users: their events, early stopping, trackers."""
