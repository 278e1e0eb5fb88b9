"""Loss by position and Needle In A Haystack, during training and by titan-sparse evaluate."""
