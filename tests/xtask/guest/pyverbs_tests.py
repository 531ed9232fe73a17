"""
Runs rdma-core's tests of verbs over a device that has no network interface.

The tests of connections by addresses ask sysfs for the interface of a device, and that for its
address. Here the address is that of the device's port: it is the first argument, and the tests
have the others.
"""
import runpy
import sys

from tests.base import RDMATestCase

ADDRESS = sys.argv.pop(1)


def take_port(self, dev, port, idx):
    self.args.append([dev, port, idx, ADDRESS, None])


RDMATestCase._get_ip_mac = take_port
runpy.run_path('tests/run_tests.py', run_name='__main__')
