"""The processes of one run: who they are, how they find each other, what they exchange."""
