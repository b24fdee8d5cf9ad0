//! A buffer of this PE's own in host memory (`HOST_NUMA`, extended GPU memory where the platform has it), symmetric.
//!
//! NVSHMEM maps the buffer a second time for other PEs' GPUs; for this PE's GPU only the first address is certain, so
//! puts and gets go from and to the heap of the PE that calls.

use egm_vendor::cuda::{Attribute, Kind, Memory};
use egm_vendor::nvshmem::Range;

use super::element::Element;
use super::job::buffer_bytes;
use super::speed;
use crate::error::Broken;

/// `nvshmem.buffer`: each PE registers HOST_NUMA memory; the PE before it puts to it and gets from it.
pub(super) fn buffer(element: &mut Element<'_>) -> Result<(), Broken> {
    let attributes = element.context.attributes();
    let node = attributes.get(Attribute::HOST_NUMA_ID).filter(|node| *node >= 0);
    let (Some(node), true) = (node, attributes.has(Attribute::HOST_NUMA)) else {
        element.found.skipped = Some(format!("this driver has no {}: update it", Attribute::HOST_NUMA));
        return Ok(());
    };
    let bytes = buffer_bytes(element.most);
    let own = Memory::new(&element.context, Kind::HostNuma(node), bytes)?;
    own.words()?.fill(element.seed_of(element.me(), 0));
    let shared = element.pe.register(&own)?;
    let length = shared.len();
    let heap = element.pe.allocate(length)?;
    let (buffer, range) = (shared.range(0, length)?, heap.range(0, length)?);
    there(element, &own, buffer, range, &heap)?;
    back(element, &own, buffer, range, &heap)?;
    element.found.seen.push(format!("{bytes:#x} bytes of node {node} a PE"));
    element.pe.free(heap)?;
    element.pe.unregister(shared)?;
    Ok(())
}

/// From the heap of each PE into the next one's buffer, which that one's processors and GPU both compare.
fn there(
    element: &mut Element<'_>,
    own: &Memory,
    buffer: Range<'_>,
    heap: Range<'_>,
    memory: &egm_vendor::nvshmem::Memory<'_>,
) -> Result<(), Broken> {
    element.fill(memory, element.seed_of(element.me(), 1))?;
    element.pe.barrier();
    let figure = speed::measure(element, "put to the next PE's HOST_NUMA buffer", heap.len(), &|element| {
        Ok(element.pe.put_on(buffer, heap, element.next(), &element.stream)?)
    })?;
    element.pe.barrier();
    keep(element, figure);
    let seed = element.seed_of(element.previous(), 1);
    if let Some(wrong) = own.words()?.compare(seed) {
        let (me, count, index) = (element.previous(), wrong.count, wrong.index);
        element.untrue(format!(
            "after PE {me}'s put, {count} words of the buffer are wrong, one is word {index}"
        ));
    }
    let wrong = element.differing_of(own, seed)?;
    if wrong > 0 {
        element.untrue(format!("this PE's GPU reads {wrong} words of its buffer wrong after a put"));
    }
    element.pe.barrier();
    Ok(())
}

/// From the next PE's buffer, which its processors filled, into the heap.
fn back(
    element: &mut Element<'_>,
    own: &Memory,
    buffer: Range<'_>,
    heap: Range<'_>,
    memory: &egm_vendor::nvshmem::Memory<'_>,
) -> Result<(), Broken> {
    own.words()?.fill(element.seed_of(element.me(), 2));
    element.fill(memory, element.seed_of(element.me(), 3))?;
    element.pe.barrier();
    let figure =
        speed::measure(element, "get from the next PE's HOST_NUMA buffer", heap.len(), &|element| {
            Ok(element.pe.get_on(heap, buffer, element.next(), &element.stream)?)
        })?;
    element.pe.barrier();
    keep(element, figure);
    let wrong = element.differing(memory, element.seed_of(element.next(), 2))?;
    if wrong > 0 {
        let next = element.next();
        element.untrue(format!("a get from PE {next}'s buffer brought {wrong} wrong words"));
    }
    element.pe.barrier();
    Ok(())
}

fn keep(element: &mut Element<'_>, figure: egm_guest::findings::Figure) {
    if element.me() == 0 {
        element.found.figures.push(figure);
    }
}
