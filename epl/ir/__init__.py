"""The intermediate representation of annotated programs."""
