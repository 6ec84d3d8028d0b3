"""Raw data to a token store: reading, curation, sampling, tokenization. No collectives; alone, before any training."""
