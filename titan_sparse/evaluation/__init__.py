"""What a model has learned: loss by position, Needle In A Haystack; in the loop and by titan-sparse evaluate."""
