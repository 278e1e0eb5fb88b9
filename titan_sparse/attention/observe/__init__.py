"""What an attention call computed: density, recall, balance, pictures."""
