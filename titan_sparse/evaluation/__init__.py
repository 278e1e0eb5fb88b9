"""Loss by position and Needle In A Haystack, during training and by titan-sparse evaluate."""

from titan_sparse.options.extras import need_here

need_here("train")
