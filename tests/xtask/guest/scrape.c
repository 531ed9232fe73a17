// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// Prints what is answered over HTTP at a UNIX socket: the guests' busybox cannot.
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	const char *get = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	char text[4096];
	ssize_t length;
	int fd;

	if (argc != 2 || strlen(argv[1]) >= sizeof(address.sun_path)) {
		fprintf(stderr, "usage: scrape SOCKET\n");
		return 2;
	}
	strcpy(address.sun_path, argv[1]);
	fd = socket(AF_UNIX, SOCK_STREAM, 0);
	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address))) {
		perror(argv[1]);
		return 1;
	}
	if (write(fd, get, strlen(get)) != (ssize_t)strlen(get)) {
		perror(argv[1]);
		return 1;
	}
	while ((length = read(fd, text, sizeof(text))) > 0) {
		if (fwrite(text, 1, length, stdout) != (size_t)length)
			return 1;
	}
	return length < 0 || fflush(stdout);
}
