"""Pure: the policy term per token, and how token terms become one loss."""
