"""Synthetic heads make the slashes and verticals of their formula."""

import torch

from scripts.benchmarks.synthetic import draw_heads, expected_logits

SEQ_LEN, HEADS, KV_HEADS = 16384, 4, 2


def test_logits_depend_on_the_distance_and_on_outliers_as_the_formula_says():
    heads = draw_heads(SEQ_LEN, HEADS, KV_HEADS, 64)
    first = SEQ_LEN - 512
    q, k = heads.q[:, :, first:], heads.k
    distances = torch.arange(512, first, 37)
    # [512, distances]: the key that lies so far before each of the last 512 queries.
    key = torch.arange(first, SEQ_LEN)[:, None] - distances
    # [Hq, distances]
    wanted = expected_logits(heads.strengths, heads.frequency, distances)
    is_ordinary = torch.ones(KV_HEADS, SEQ_LEN, dtype=torch.bool)
    is_ordinary.scatter_(1, heads.outliers, False)
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        # [512, S]
        logits = (q[0, head] @ k[0, kv_head].T) * 64**-0.5

        by_distance = logits.gather(1, key)
        of_ordinary = by_distance.where(is_ordinary[kv_head][key], torch.nan)
        mean = of_ordinary.nanmean(0).double()
        # 512 noisy pairs a distance.
        assert (mean - wanted[head]).abs().max() < 0.5
        correlation = torch.corrcoef(torch.stack([mean, wanted[head]]))[0, 1]
        assert correlation > 0.995

        # Outliers are the same from everywhere.
        of_outliers = logits[:, heads.outliers[kv_head]]
        assert of_outliers.mean(0).std() < 1.2
        assert of_outliers.mean() > wanted[head].median() + 2
