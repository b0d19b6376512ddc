"""Input processing: user input becomes requests with token ids."""
