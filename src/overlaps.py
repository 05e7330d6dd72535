"""Does a scored set hold what is trained on? Sound is compared by content, so copies and other names do not hide it."""

from data_check import SetCheck

SHOWN_SPEAKERS = 5


def describe_overlaps(train: SetCheck, scored: SetCheck) -> list[str]:
    """Warnings for the log and the report: a scored set has sound (file and segment) or speakers of the training set."""
    lines = []
    known = {sound for sound in train.sounds if sound}
    shared = [row for row, sound in zip(scored.rows, scored.sounds, strict=True) if sound in known]
    if shared:
        lines.append(
            f"warning: {scored.name}: {len(shared):,} of {len(scored.rows):,} clips are in train, too, the first one "
            f"{shared[0].file}:{shared[0].line} ({shared[0].audio}): scores of this set are better than they should be"
        )
    speakers = {row.speaker for row in scored.rows if row.speaker}
    common = sorted(speakers & {row.speaker for row in train.rows})
    if common:
        names = ", ".join(common[:SHOWN_SPEAKERS]) + (", ..." if len(common) > SHOWN_SPEAKERS else "")
        lines.append(
            f"warning: {scored.name}: {len(common):,} of {len(speakers):,} speaker{'s' if len(speakers) > 1 else ''} "
            f"are in train, too ({names}): scores of this set say nothing about new voices"
        )
    return lines
