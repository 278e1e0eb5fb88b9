"""What a model has learned: loss by position, Needle In A Haystack, RULER; in the loop and by titan-sparse evaluate."""
