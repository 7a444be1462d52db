"""The life of groups and episodes in the store: leases, the journal, partial turns, endings, scores, replays."""
