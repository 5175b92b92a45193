"""The SDK's connections: channels to several coordinators, and typed calls over them."""
