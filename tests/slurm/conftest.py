from tests.e2e.conftest import setup

__all__ = ["setup"]
