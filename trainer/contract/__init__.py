"""All that others may know of a trainer, without torch: spec, progress, schedule, costs, ..."""
