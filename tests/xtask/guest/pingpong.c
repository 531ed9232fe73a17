// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Requests and responses of one byte over a TCP connection, one at a time:
 *
 *	pingpong serve PORT
 *	pingpong ask ADDRESS PORT COUNT
 *
 * The server serves one connection and ends with it. The client prints
 *
 *	median MICROSECONDS
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static int checked(int result, const char *what)
{
	if (result < 0)
		fail(what);
	return result;
}

static struct sockaddr_in at(const char *address, const char *port)
{
	struct sockaddr_in where = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)) };

	if (address && inet_pton(AF_INET, address, &where.sin_addr) != 1) {
		fprintf(stderr, "%s is no address\n", address);
		exit(1);
	}
	return where;
}

static int stream(void)
{
	return checked(socket(AF_INET, SOCK_STREAM, 0), "socket");
}

static void at_once(int connection)
{
	int one = 1;

	checked(setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)), "TCP_NODELAY");
}

static void serve(const char *port)
{
	struct sockaddr_in where = at(NULL, port);
	int one = 1, listener = stream(), connection;
	char byte;

	checked(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)), "SO_REUSEADDR");
	checked(bind(listener, (struct sockaddr *)&where, sizeof(where)), "bind");
	checked(listen(listener, 1), "listen");
	connection = checked(accept(listener, NULL, NULL), "accept");
	at_once(connection);
	while (checked((int)read(connection, &byte, 1), "read") == 1)
		checked((int)write(connection, &byte, 1), "write");
}

static double now_us(void)
{
	struct timespec now;

	checked(clock_gettime(CLOCK_MONOTONIC, &now), "clock_gettime");
	return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int order(const void *left, const void *right)
{
	double difference = *(const double *)left - *(const double *)right;

	return (difference > 0) - (difference < 0);
}

static void ask(const char *address, const char *port, size_t count)
{
	struct sockaddr_in where = at(address, port);
	double *times = calloc(count, sizeof(*times));
	int connection = stream();
	char byte = 'x';

	if (!times || !count)
		fail("calloc");
	checked(connect(connection, (struct sockaddr *)&where, sizeof(where)), "connect");
	at_once(connection);
	for (size_t i = 0; i < count; i++) {
		double begin = now_us();

		checked((int)write(connection, &byte, 1), "write");
		if (checked((int)read(connection, &byte, 1), "read") != 1) {
			fprintf(stderr, "The server has gone\n");
			exit(1);
		}
		times[i] = now_us() - begin;
	}
	qsort(times, count, sizeof(*times), order);
	printf("median %.1f\n", times[count / 2]);
	free(times);
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "serve")) {
		serve(argv[2]);
	} else if (argc == 5 && !strcmp(argv[1], "ask")) {
		ask(argv[2], argv[3], (size_t)atol(argv[4]));
	} else {
		fprintf(stderr, "usage: pingpong serve PORT | pingpong ask ADDRESS PORT COUNT\n");
		return 2;
	}
	return 0;
}
