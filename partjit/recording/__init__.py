"""What programs and colocated calls did: subscribers of `partjit.events` that record, sum, draw and display."""

from partjit.recording.display import progress as progress
from partjit.recording.spans import Span as Span
from partjit.recording.timeline import Timeline as Timeline
from partjit.recording.timeline import record as record
