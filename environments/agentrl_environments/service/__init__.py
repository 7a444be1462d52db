"""Service: the desk of a bicycle rental, a customer with a hidden goal, and rules that the customer does not know.

desk        the database and its writes      texts       the rules of the house
customer    the scripted customer            facts       amounts and days in a message
model_customer   a customer that a model plays
draft, kinds, tasks   a seed makes a task    environment `Service`
"""

from agentrl_environments.service.customer import ScriptedCustomer, Wish
from agentrl_environments.service.environment import Service
from agentrl_environments.service.tasks import ServiceTask, make_task

__all__ = ["ScriptedCustomer", "Service", "ServiceTask", "Wish", "make_task"]
