// A double of libmlx5.so.1: of Data Direct, over the double of libibverbs.

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct mr *ibv_reg_dmabuf_mr(void *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access);

static int fault(const char *name)
{
	const char *set = getenv("EGM_FAKE_FAULT");
	return set && !strcmp(set, name);
}

int mlx5dv_get_data_direct_sysfs_path(void *context, char *path, size_t size)
{
	static const char function[] = "/sys/devices/pci0001:00/0001:00:00.0/0001:01:00.0";
	(void)context;
	if (fault("direct-none"))
		return ENODEV;
	if (fault("direct-path")) {
		memset(path, 'x', size);
		return 0;
	}
	if (size < sizeof function)
		return ENOSPC;
	memcpy(path, function, sizeof function);
	return 0;
}
struct mr *mlx5dv_reg_dmabuf_mr(void *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access, int mlx5_access)
{
	if (mlx5_access != 1 || fault("direct-refused")) {
		errno = EOPNOTSUPP;
		return 0;
	}
	return ibv_reg_dmabuf_mr(pd, offset, length, iova, fd, access);
}
