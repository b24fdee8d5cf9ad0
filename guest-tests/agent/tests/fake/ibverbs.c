// A double of libibverbs.so.1: one device with queue pairs that reach each other within one process. It moves bytes
// as they should be moved, or, as EGM_FAKE_FAULT selects, not quite: each fault is one that a check has to find.
//
// The structures are those of infiniband/verbs.h as far as they are used; tests/layout.rs of egm-vendor has their offsets.

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>

#define MOST 256
#define RING 1024
#define ON_DEMAND (1 << 6)
#define RELAXED (1 << 20)

struct device { void *ops[2]; int node_type, transport_type; char name[64], dev_name[64], dev_path[256], ibdev_path[256]; };
struct gid_entry { uint64_t gid[2]; uint32_t index, port, type, interface; };
struct sge { uint64_t addr; uint32_t length, lkey; };
struct send_wr {
	uint64_t id; struct send_wr *next; struct sge *list; int count; uint32_t opcode, flags, imm;
	union { struct { uint64_t addr; uint32_t key; } rdma; struct { uint64_t addr, add, swap; uint32_t key; } atomic; } wr;
	uint64_t rest[7];
};
struct recv_wr { uint64_t id; struct recv_wr *next; struct sge *list; int count; };
struct wc { uint64_t id; uint32_t status, opcode, vendor, bytes, imm, qp, source, flags; uint16_t pkey, slid; uint8_t sl, path; };
struct context;
struct ops {
	void *before[11]; int (*poll_cq)(void *, int, struct wc *); void *between[13];
	int (*post_send)(void *, struct send_wr *, struct send_wr **); int (*post_recv)(void *, struct recv_wr *, struct recv_wr **);
	void *rest[5];
};
struct context { struct device *device; struct ops ops; int cmd, async, vectors; pthread_mutex_t mutex; void *compat; };
struct around {
	int (*query_port)(struct context *, uint8_t, void *, size_t); void *before[25], *private;
	int (*query_device_ex)(struct context *, const void *, void *, size_t); void *behind[11]; size_t size; struct context context;
};
struct pd { struct context *context; uint32_t handle; };
struct mr { struct context *context; struct pd *pd; void *addr; size_t length; uint32_t handle, lkey, rkey; };
struct cq { struct context *context; void *channel, *user; uint32_t handle; int cqe; struct wc ring[RING]; unsigned head, tail; };
struct qp {
	struct context *context; void *user; struct pd *pd; struct cq *send, *recv; void *srq; uint32_t handle, number, state, type;
	uint32_t other; struct { uint64_t id; struct sge piece; } waiting[RING]; unsigned head, tail;
};
// The beginnings and offsets that matter of the larger structures.
struct init_attr { void *user; struct cq *send, *recv; void *srq; uint32_t cap[5], type; int all; };

static struct device device = { .node_type = 1, .name = "fake0", .dev_name = "uverbs0" };
static struct device *devices[2] = { &device, 0 };
// `name` is how requests call the first byte; it is the address but for dma-bufs.
static struct region { int used, access, foreign; char *start, *stale; uint64_t name; size_t length; } regions[MOST];
static struct qp *pairs[MOST];
static uint64_t additions;
// A write that was reported as done and is not yet.
static struct { char *to; char *bytes; size_t length; } late;

static int fault(const char *name)
{
	const char *set = getenv("EGM_FAKE_FAULT");
	return set && !strcmp(set, name);
}

static void finish_late(void)
{
	if (late.bytes) {
		memcpy(late.to, late.bytes, late.length);
		free(late.bytes);
		late.bytes = 0;
	}
}

struct device **ibv_get_device_list(int *count)
{
	if (fault("devices-abort"))
		abort();
	*count = fault("devices-many") ? 1 << 30 : 1;
	return devices;
}
void ibv_free_device_list(struct device **list) { (void)list; }

static void attributes(char *attr)
{
	strcpy(attr, "1.0");
	*(uint64_t *)(attr + 80) = ~0ull;
	*(int *)(attr + 112) = 512;		// max_qp_wr
	*(int *)(attr + 132) = RING - 1;	// max_cqe
	*(int *)(attr + 144) = 16;		// max_qp_rd_atom
	*(int *)(attr + 156) = 16;		// max_qp_init_rd_atom
	*(int *)(attr + 164) = 1;		// atomic_cap
	*(uint8_t *)(attr + 227) = 1;		// phys_port_cnt
}
int ibv_query_device(struct context *context, void *attr) { (void)context; memset(attr, 0, 232); attributes(attr); return 0; }
static int query_device_ex(struct context *context, const void *input, void *attr, size_t size)
{
	(void)context; (void)input;
	memset(attr, 0, size);
	attributes(attr);
	*(uint64_t *)((char *)attr + 240) = 3;		// explicit and implicit
	*(uint32_t *)((char *)attr + 248) = 0x1f;	// send to atomic
	return 0;
}
static int query_port(struct context *context, uint8_t port, void *attr, size_t size)
{
	(void)context;
	if (port != 1)
		return EINVAL;
	memset(attr, 0, size);
	uint32_t *words = attr;
	words[0] = 4; words[1] = words[2] = 3; words[3] = 1; words[5] = 1 << 30;
	((uint8_t *)attr)[46] = 2;
	return 0;
}
int ibv_query_port(struct context *context, uint8_t port, void *attr) { return query_port(context, port, attr, 48); }
ssize_t _ibv_query_gid_table(struct context *context, struct gid_entry *table, size_t most, uint32_t flags, size_t size)
{
	(void)context; (void)flags;
	static const uint8_t gid[16] = { [10] = 0xff, [11] = 0xff, [12] = 10, [15] = 2 };
	// The kernel's attributes have a length of 16 bits.
	if (most * size > 65535)
		return -EINVAL;
	if (fault("gids-many"))
		return most + 1;
	memcpy(table->gid, gid, 16);
	table->index = 0; table->port = 1; table->type = 2; table->interface = 2;
	return 1;
}

static int poll_cq(void *queue, int most, struct wc *told);
static int post_send(void *pair, struct send_wr *wr, struct send_wr **bad);
static int post_recv(void *pair, struct recv_wr *wr, struct recv_wr **bad);
struct context *ibv_open_device(struct device *of)
{
	struct around *around = calloc(1, sizeof *around);
	around->query_port = query_port;
	around->query_device_ex = query_device_ex;
	around->size = sizeof *around;
	around->context.device = of;
	around->context.ops.poll_cq = poll_cq;
	around->context.ops.post_send = post_send;
	around->context.ops.post_recv = post_recv;
	around->context.compat = (void *)~(uintptr_t)0;
	return &around->context;
}
int ibv_close_device(struct context *context) { free((char *)context - offsetof(struct around, context)); return 0; }
struct pd *ibv_alloc_pd(struct context *context) { struct pd *pd = calloc(1, sizeof *pd); pd->context = context; return pd; }
int ibv_dealloc_pd(struct pd *pd) { free(pd); return 0; }

struct mr *ibv_reg_mr_iova2(struct pd *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	(void)iova;
	if (access & ON_DEMAND && fault("odp-lie")) {
		errno = EOPNOTSUPP;
		return 0;
	}
	for (unsigned key = 1; key < MOST; key++) {
		struct region *region = &regions[key];
		if (region->used)
			continue;
		*region = (struct region){ 1, access, 0, addr, 0, (uint64_t)addr, length };
		if (addr && ((access & ON_DEMAND && fault("odp-stale")) || fault("pages-old"))) {
			// Pages as they were: what moves away later is not followed, or was never looked up right.
			region->stale = malloc(length);
			memcpy(region->stale, addr, length);
		}
		struct mr *mr = calloc(1, sizeof *mr);
		*mr = (struct mr){ pd->context, pd, addr, length, key, key, key };
		return mr;
	}
	errno = ENOMEM;
	return 0;
}
struct mr *ibv_reg_mr(struct pd *pd, void *addr, size_t length, int access) { return ibv_reg_mr_iova2(pd, addr, length, 0, access); }
struct mr *ibv_reg_dmabuf_mr(struct pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
	if (fault("dmabuf-none") || (fd >= 0 && fault("dmabuf-lie"))) {
		errno = EOPNOTSUPP;
		return 0;
	}
	if (fault("dmabuf-unclear")) {
		errno = EINVAL;
		return 0;
	}
	if (fd < 0) {
		errno = EBADF;
		return 0;
	}
	char *start = mmap(0, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
	if (start == MAP_FAILED)
		return 0;
	struct mr *mr = ibv_reg_mr_iova2(pd, start, length, iova, (unsigned)access);
	if (mr) {
		regions[mr->lkey].foreign = 1;
		regions[mr->lkey].name = iova;
	}
	return mr;
}
int ibv_dereg_mr(struct mr *mr)
{
	finish_late();
	free(regions[mr->lkey].stale);
	if (regions[mr->lkey].foreign)
		munmap(regions[mr->lkey].start, regions[mr->lkey].length);
	regions[mr->lkey] = (struct region){ 0 };
	free(mr);
	return 0;
}

struct cq *ibv_create_cq(struct context *context, int entries, void *user, void *channel, int vector)
{
	(void)vector;
	struct cq *cq = calloc(1, sizeof *cq);
	cq->context = context; cq->user = user; cq->channel = channel; cq->cqe = entries;
	return cq;
}
int ibv_destroy_cq(struct cq *cq) { free(cq); return 0; }
struct qp *ibv_create_qp(struct pd *pd, struct init_attr *wanted)
{
	struct qp *qp = calloc(1, sizeof *qp);
	for (unsigned number = 1; number < MOST; number++) {
		if (pairs[number])
			continue;
		pairs[number] = qp;
		qp->context = pd->context; qp->pd = pd; qp->send = wanted->send; qp->recv = wanted->recv;
		qp->number = number; qp->type = wanted->type;
		return qp;
	}
	free(qp);
	errno = ENOMEM;
	return 0;
}
int ibv_destroy_qp(struct qp *qp) { finish_late(); pairs[qp->number] = 0; free(qp); return 0; }
int ibv_modify_qp(struct qp *qp, void *attr, int mask)
{
	// One step after the other, each with what it has to say.
	static const int needed[4] = { 0, 0x39, 0x1 | 0x80 | 0x100 | 0x100000 | 0x1000 | 0x20000 | 0x8000, 0x1 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x2000 };
	uint32_t *words = attr;
	if (words[0] != qp->state + 1 || words[0] > 3 || mask != needed[words[0]])
		return EINVAL;
	qp->state = words[0];
	if (qp->state == 2)
		qp->other = words[7];
	return 0;
}

static char *place(uint32_t key, uint64_t address, size_t length, int needed)
{
	struct region *region = key < MOST ? &regions[key] : 0;
	if (!region || !region->used || (needed & region->access) != needed)
		return 0;
	uint64_t offset = address - region->name;
	if (offset > region->length || length > region->length - offset)
		return 0;
	return (region->stale ? region->stale : region->start) + offset;
}
static void complete(struct cq *cq, uint64_t id, uint32_t status, uint32_t opcode, uint32_t bytes)
{
	cq->ring[cq->tail++ % RING] = (struct wc){ .id = id, .status = status, .opcode = opcode, .bytes = bytes };
}
static int poll_cq(void *queue, int most, struct wc *told)
{
	struct cq *cq = queue;
	int count = 0;
	if (cq->head == cq->tail)
		finish_late();
	if (fault("completions-many") && cq->head != cq->tail)
		return most + 1;
	while (count < most && cq->head != cq->tail)
		told[count++] = cq->ring[cq->head++ % RING];
	return count;
}

static void write_bytes(char *to, const char *from, size_t length, int relaxed, int foreign)
{
	if (fault("write-tail"))
		length -= length > 8 ? 8 : length > 1;
	if (fault("early") || (relaxed && fault("relaxed-late"))) {
		late.bytes = malloc(length);
		memcpy(late.bytes, from, length);
		late.to = to;
		late.length = length;
		return;
	}
	memmove(to, from, length);
	if (fault("write-beside"))
		to[length] ^= 1;
	if (foreign && fault("dmabuf-byte"))
		to[length - 1] ^= 1;
}
// As rdma_rxe of Linux 7.3.4 copies to and from memory without pinned pages: packet by packet, each to its page's first byte,
// and again the packet's beginning where it goes on in the next page.
static void copy_without_place(char *memory, char *bytes, size_t length, int to_memory)
{
	for (size_t done = 0; done < length; done += 1024) {
		size_t packet = length - done < 1024 ? length - done : 1024, offset = (uintptr_t)(memory + done) % 4096;
		char *page = memory + done - offset;
		for (size_t left = packet; left; page += 4096, offset = 0) {
			size_t part = left < 4096 - offset ? left : 4096 - offset;
			if (to_memory)
				memcpy(page, bytes + done, part);
			else
				memcpy(bytes + done, page, part);
			left -= part;
		}
	}
}
static uint32_t atomic(const struct send_wr *wr, char *answer)
{
	uint64_t *word = (uint64_t *)place(wr->wr.atomic.key, wr->wr.atomic.addr, 8, 8), was;
	if (!word)
		return 10;
	was = *word;
	if (wr->opcode == 6) {
		if (!fault("atomic-lost") || ++additions % 97)
			*word += wr->wr.atomic.add;
	} else if (was == wr->wr.atomic.add || fault("compare-always")) {
		*word = wr->wr.atomic.swap;
	}
	if (fault("atomic-answer"))
		was++;
	memcpy(answer, &was, 8);
	return 0;
}
static uint32_t deliver(struct qp *other, const char *from, uint32_t length)
{
	if (other->head == other->tail)
		return 13;
	struct sge piece = other->waiting[other->head % RING].piece;
	uint64_t id = other->waiting[other->head++ % RING].id;
	char *to = place(piece.lkey, piece.addr, length, 1);
	if (!to || length > piece.length)
		return 11;
	memmove(to, from, length);
	complete(other->recv, id, 0, 128, fault("send-short") ? length - 1 : length);
	return 0;
}
static int post_send(void *pair, struct send_wr *wr, struct send_wr **bad)
{
	struct qp *qp = pair, *other = qp->other < MOST ? pairs[qp->other] : 0;
	struct sge piece = *wr->list;
	if (qp->state != 3 || wr->count != 1 || wr->next) {
		*bad = wr;
		return EINVAL;
	}
	finish_late();
	char *local = place(piece.lkey, piece.addr, piece.length, 0);
	char *remote = wr->opcode == 0 ? place(wr->wr.rdma.key, wr->wr.rdma.addr, piece.length, 2)
		: wr->opcode == 4 ? place(wr->wr.rdma.key, wr->wr.rdma.addr, piece.length, 4) : local;
	uint32_t status = !other ? 12 : !local ? 4 : !remote ? 10 : 0;
	int without_place = fault("odp-place") && !status && (wr->opcode == 0 || wr->opcode == 4)
		&& regions[wr->wr.rdma.key].access & ON_DEMAND;
	if (without_place)
		copy_without_place(remote, local, piece.length, wr->opcode == 0);
	else if (!status && wr->opcode == 0)
		write_bytes(remote, local, piece.length, regions[wr->wr.rdma.key].access & RELAXED, regions[wr->wr.rdma.key].foreign);
	else if (!status && wr->opcode == 4) {
		if (!fault("read-none"))
			memmove(local, remote, piece.length);
		if (fault("read-flip"))
			local[piece.length / 2] ^= 0x10;
	} else if (!status && wr->opcode == 2)
		status = deliver(other, local, piece.length);
	else if (!status)
		status = atomic(wr, local);
	complete(qp->send, wr->id, status, 0, piece.length);
	return 0;
}
static int post_recv(void *pair, struct recv_wr *wr, struct recv_wr **bad)
{
	struct qp *qp = pair;
	(void)bad;
	qp->waiting[qp->tail % RING].id = wr->id;
	qp->waiting[qp->tail++ % RING].piece = *wr->list;
	return 0;
}
