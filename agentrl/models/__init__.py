"""A model's name becomes a folder: a path, a registered id, or an id of the Hugging Face hub."""
