"""What a row is to the rows before it in its trajectory, in numbers: rules read them without tensors."""

UNKNOWN, FIRST, CONTINUED, SAME, REWRITTEN, NEW = -1, 0, 1, 2, 3, 4
"""What a row is to the rows before it in its trajectory.

FIRST: there is none. CONTINUED: it begins with prompt and response of one. SAME: it has the prompt of one, as a retry
has. REWRITTEN: its prompt begins with that of one, and goes on with other tokens than that one's response. NEW: its
prompt begins with none of these.
"""
