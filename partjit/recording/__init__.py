"""What programs and colocated calls did: subscribers of `partjit.events` that record, sum, draw and display."""

from partjit.recording.clocks import ClockOffset as ClockOffset
from partjit.recording.display import progress as progress
from partjit.recording.gathering import gather_timelines as gather_timelines
from partjit.recording.merging import MergedTimeline as MergedTimeline
from partjit.recording.merging import merge_timelines as merge_timelines
from partjit.recording.otel import export_spans as export_spans
from partjit.recording.process_waits import ProcessWait as ProcessWait
from partjit.recording.spans import Span as Span
from partjit.recording.timeline import Timeline as Timeline
from partjit.recording.timeline import record as record
