"""One module per trainer: it drives the trainer over a scenario and reports what entered its loss. Only these import
trainers; `adapter.py` is what they all are."""
