// SPDX-License-Identifier: GPL-2.0-only
/*
 * A test double of NVIDIA's nvgrace-egm driver, for the emulated Grace host of the lab. It is not NVIDIA's driver and has no
 * line of it: it was written from the interface that programs see, which all of that driver's versions share. Memory that the
 * kernel does not have (mem=) stands in for the carve-out of Grace's firmware.
 *
 *   /dev/egm<PXM>                       mmap() of the region, cacheable, without struct page; open once, zeroed by open()
 *   ioctl 0x4564                        the list of retired pages
 *   /sys/class/egm/egm<PXM>/egm_size    bytes, hexadecimal
 *   /sys/class/egm/egm<PXM>/gpu_devices PCI addresses of the GPUs of its socket, a line each
 *
 * Which regions there are the GPUs' properties say, as for the driver: nvidia,egm-pxm, nvidia,egm-base-pa, nvidia,egm-size; GPUs
 * of one socket repeat them. Pages that firmware retired are on the command line: nvgrace_egm.retired=PXM:OFFSET,... in
 * blocks of 64 KiB. The double alone has /sys/kernel/debug/egm/egm<PXM>/poison: an offset written there goes bad.
 */
#include <linux/bitmap.h>
#include <linux/cdev.h>
#include <linux/debugfs.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/io.h>
#include <linux/memory-failure.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/overflow.h>
#include <linux/pci.h>
#include <linux/property.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#define MAX_REGIONS 8
#define MAX_GPUS 8
#define MAX_RETIRED 64
/* Firmware retires blocks of this size. */
#define BLOCK SZ_64K

#define EGM_RETIRED_PAGES_LIST _IO('E', 100)

struct egm_retired_page {
	__aligned_u64 offset;
	__aligned_u64 size;
};

struct egm_retired_pages_list {
	__u32 argsz;
	__u32 count;
	struct egm_retired_page pages[];
};

struct egm_region {
	struct cdev cdev;
	struct pfn_address_space space;
	u64 pxm;
	u64 base;
	u64 size;
	struct pci_dev *gpus[MAX_GPUS];
	unsigned int gpu_count;
	/* A bit a page. */
	unsigned long *retired;
	unsigned long open;
};

static struct egm_region *regions[MAX_REGIONS];
static unsigned int region_count;
static dev_t first;
static struct dentry *debug;

static char *retired[MAX_RETIRED];
static unsigned int retired_count;
module_param_array(retired, charp, &retired_count, 0444);
MODULE_PARM_DESC(retired, "pages that firmware retired, as PXM:OFFSET, in blocks of 64 KiB");

static unsigned long pages(const struct egm_region *region)
{
	return region->size >> PAGE_SHIFT;
}

/*
 * Memory failure asks where a mapping has the bad page: the page is retired from now on. Nothing may sleep here.
 */
static int bad_page(struct vm_area_struct *vma, unsigned long pfn, pgoff_t *pgoff)
{
	struct egm_region *region = vma->vm_file->private_data;
	unsigned long page = pfn - PHYS_PFN(region->base);

	if (page >= pages(region))
		return -EFAULT;
	set_bit(page, region->retired);
	if (page < vma->vm_pgoff || page - vma->vm_pgoff >= vma_pages(vma))
		return -EFAULT;
	*pgoff = page;
	return 0;
}

static int scrub(const struct egm_region *region)
{
	u64 at;

	for (at = 0; at < region->size; at += SZ_64M) {
		size_t chunk = min_t(u64, SZ_64M, region->size - at);
		void *memory;

		if (fatal_signal_pending(current))
			return -EINTR;
		memory = memremap(region->base + at, chunk, MEMREMAP_WB);
		if (!memory)
			return -ENOMEM;
		memset(memory, 0, chunk);
		memunmap(memory);
		cond_resched();
	}
	return 0;
}

static int egm_open(struct inode *inode, struct file *file)
{
	struct egm_region *region = container_of(inode->i_cdev, struct egm_region, cdev);
	int ret;

	if (test_and_set_bit_lock(0, &region->open))
		return -EBUSY;
	ret = scrub(region);
	if (ret)
		goto out;
	region->space.node.start = PHYS_PFN(region->base);
	region->space.node.last = PHYS_PFN(region->base) + pages(region) - 1;
	region->space.mapping = inode->i_mapping;
	region->space.pfn_to_vma_pgoff = bad_page;
	ret = register_pfn_address_space(&region->space);
	if (ret)
		goto out;
	file->private_data = region;
	return 0;
out:
	clear_bit_unlock(0, &region->open);
	return ret;
}

/* Called when the last descriptor and the last mapping are gone. */
static int egm_release(struct inode *inode, struct file *file)
{
	struct egm_region *region = file->private_data;

	unregister_pfn_address_space(&region->space);
	clear_bit_unlock(0, &region->open);
	return 0;
}

static int egm_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct egm_region *region = file->private_data;
	unsigned long end;

	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	if (check_add_overflow(vma->vm_pgoff, vma_pages(vma), &end))
		return -EOVERFLOW;
	if (vma->vm_pgoff >= pages(region) || end > pages(region))
		return -EINVAL;
	return remap_pfn_range(vma, vma->vm_start, PHYS_PFN(region->base) + vma->vm_pgoff,
			       vma->vm_end - vma->vm_start, vma->vm_page_prot);
}

static long egm_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	struct egm_region *region = file->private_data;
	struct egm_retired_pages_list __user *list = (void __user *)argument;
	struct egm_retired_pages_list header;
	unsigned long page;
	u32 room;

	if (command != EGM_RETIRED_PAGES_LIST)
		return -ENOTTY;
	if (copy_from_user(&header, list, sizeof(header)))
		return -EFAULT;
	if (header.argsz < sizeof(header))
		return -EINVAL;
	room = (header.argsz - sizeof(header)) / sizeof(struct egm_retired_page);
	header.count = bitmap_weight(region->retired, pages(region));
	header.argsz = struct_size(list, pages, header.count);
	if (header.count > room) {
		/* Not an error: "again, with more". */
		header.count = 0;
	} else {
		u32 n = 0;

		for_each_set_bit(page, region->retired, pages(region)) {
			struct egm_retired_page entry = { (u64)page << PAGE_SHIFT, PAGE_SIZE };

			/* A page that went bad after the count is reported by the next call. */
			if (n == header.count)
				break;
			if (copy_to_user(&list->pages[n++], &entry, sizeof(entry)))
				return -EFAULT;
		}
		header.count = n;
	}
	return copy_to_user(list, &header, sizeof(header)) ? -EFAULT : 0;
}

static const struct file_operations egm_files = {
	.owner = THIS_MODULE,
	.open = egm_open,
	.release = egm_release,
	.mmap = egm_mmap,
	.unlocked_ioctl = egm_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
};

static ssize_t egm_size_show(struct device *device, struct device_attribute *attribute, char *text)
{
	struct egm_region *region = dev_get_drvdata(device);

	return sysfs_emit(text, "0x%llx\n", region->size);
}
static DEVICE_ATTR_RO(egm_size);

static ssize_t gpu_devices_show(struct device *device, struct device_attribute *attribute, char *text)
{
	struct egm_region *region = dev_get_drvdata(device);
	int length = 0;
	unsigned int n;

	for (n = 0; n < region->gpu_count; n++)
		length += sysfs_emit_at(text, length, "%s\n", pci_name(region->gpus[n]));
	return length;
}
static DEVICE_ATTR_RO(gpu_devices);

static struct attribute *egm_attrs[] = {
	&dev_attr_egm_size.attr,
	&dev_attr_gpu_devices.attr,
	NULL,
};
ATTRIBUTE_GROUPS(egm);

static const struct class egm_class = {
	.name = "egm",
	.dev_groups = egm_groups,
};

static int poison(void *data, u64 offset)
{
	struct egm_region *region = data;

	if (offset >= region->size)
		return -EINVAL;
	set_bit(offset >> PAGE_SHIFT, region->retired);
	return memory_failure(PHYS_PFN(region->base + offset), 0);
}
DEFINE_DEBUGFS_ATTRIBUTE(poison_files, NULL, poison, "%llu\n");

/* Blocks of the command line that are this region's. */
static void retire(struct egm_region *region)
{
	unsigned int n;

	for (n = 0; n < retired_count; n++) {
		char *rest = NULL;
		u64 pxm = memparse(retired[n], &rest);
		u64 offset = rest && *rest == ':' ? memparse(rest + 1, NULL) : 0;

		if (pxm != region->pxm || *rest != ':')
			continue;
		if (!IS_ALIGNED(offset, BLOCK) || offset >= region->size) {
			pr_err("egm%llu has no block of 64 KiB at 0x%llx\n", pxm, offset);
			continue;
		}
		bitmap_set(region->retired, offset >> PAGE_SHIFT, BLOCK >> PAGE_SHIFT);
	}
}

static int __init publish(struct egm_region *region, dev_t number)
{
	struct device *device;
	struct dentry *folder;
	char name[16];
	int ret;

	region->retired = bitmap_zalloc(pages(region), GFP_KERNEL);
	if (!region->retired)
		return -ENOMEM;
	retire(region);
	cdev_init(&region->cdev, &egm_files);
	ret = cdev_add(&region->cdev, number, 1);
	if (ret)
		return ret;
	device = device_create(&egm_class, &region->gpus[0]->dev, number, region, "egm%llu", region->pxm);
	if (IS_ERR(device))
		return PTR_ERR(device);
	snprintf(name, sizeof(name), "egm%llu", region->pxm);
	folder = debugfs_create_dir(name, debug);
	debugfs_create_file_unsafe("poison", 0200, folder, region, &poison_files);
	pr_info("a test double: egm%llu is 0x%llx bytes at 0x%llx\n", region->pxm, region->size, region->base);
	return 0;
}

static struct egm_region *__init region_of(u64 pxm)
{
	unsigned int n;

	for (n = 0; n < region_count; n++)
		if (regions[n]->pxm == pxm)
			return regions[n];
	if (region_count == MAX_REGIONS)
		return NULL;
	regions[region_count] = kzalloc(sizeof(struct egm_region), GFP_KERNEL);
	if (!regions[region_count])
		return NULL;
	regions[region_count]->pxm = pxm;
	return regions[region_count++];
}

static int __init egm_init(void)
{
	struct pci_dev *gpu = NULL;
	struct egm_region *region;
	unsigned int n;
	int ret;
	u64 pxm;

	for_each_pci_dev(gpu) {
		if (device_property_read_u64(&gpu->dev, "nvidia,egm-pxm", &pxm))
			continue;
		region = region_of(pxm);
		if (!region || region->gpu_count == MAX_GPUS ||
		    device_property_read_u64(&gpu->dev, "nvidia,egm-base-pa", &region->base) ||
		    device_property_read_u64(&gpu->dev, "nvidia,egm-size", &region->size) ||
		    !region->size || !PAGE_ALIGNED(region->base | region->size)) {
			pci_err(gpu, "its EGM region is not described well\n");
			pci_dev_put(gpu);
			return -EINVAL;
		}
		region->gpus[region->gpu_count++] = pci_dev_get(gpu);
	}
	if (!region_count)
		return 0;
	ret = alloc_chrdev_region(&first, 0, MAX_REGIONS, "egm");
	if (ret)
		return ret;
	ret = class_register(&egm_class);
	if (ret)
		return ret;
	debug = debugfs_create_dir("egm", NULL);
	for (n = 0; n < region_count && !ret; n++)
		ret = publish(regions[n], MKDEV(MAJOR(first), n));
	return ret;
}
/* After PCI functions have been found. Built in, for the machine's life: there is nothing to undo. */
late_initcall(egm_init);

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("A test double of NVIDIA's nvgrace-egm driver");
