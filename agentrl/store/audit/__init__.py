"""Checks of the laws on the rows of a store, and the measured bias of what was trained."""
