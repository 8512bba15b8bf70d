"""Models that laws on points run for."""

import pytest

from constmem import NeuralProcess
from tests.laws.models import CONSTANT, POINT_MODELS
from tests.laws.points import Factory, built, factory_of


@pytest.fixture(params=POINT_MODELS)
def factory(request: pytest.FixtureRequest) -> Factory:
    return factory_of(request.param)


@pytest.fixture
def model(factory: Factory) -> NeuralProcess:
    return built(factory)


@pytest.fixture(params=CONSTANT)
def constant_factory(request: pytest.FixtureRequest) -> Factory:
    return factory_of(request.param)


@pytest.fixture
def constant(constant_factory: Factory) -> NeuralProcess:
    return built(constant_factory)
