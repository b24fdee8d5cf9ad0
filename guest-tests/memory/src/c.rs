//! The C face: `include/egm_memory.h`. This is an unsafe module.
//!
//! The header states what C callers must guarantee; their pointers are used only under those guarantees.
#![expect(unsafe_code, reason = "C calls by pointer")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::AsRawFd;
use std::ptr;

use egm_address::PciAddress;
use rustix::io::Errno;

use crate::MemoryError;
use crate::function::{Found, Function, find};
use crate::mapping::Memory;

/// `struct egm_memory` of `include/egm_memory.h`: a function with its memory mapped.
#[repr(C)]
#[derive(Debug)]
pub struct CMemory {
    address: *mut c_void,
    size: u64,
    page: u64,
    pxm: u32,
    file: c_int,
    handle: *mut c_void,
}

/// `struct egm_span` of `include/egm_memory.h`: retired bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CSpan {
    offset: u64,
    size: u64,
}

/// What the handle points to.
struct Opened {
    function: Function,
    memory: Memory,
}

/// `egm_memory_open`: 0, or a negative error number.
///
/// # Safety
/// `function` is null or a string that ends in NUL; `memory` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_memory_open(function: *const c_char, memory: *mut CMemory) -> c_int {
    // SAFETY: the caller's promise.
    let name = (!function.is_null()).then(|| unsafe { CStr::from_ptr(function) });
    let opened = find().map_err(|error| number(&error)).and_then(|found| open(&found, name));
    match (opened, memory.is_null()) {
        (Err(error), _) => -error,
        (_, true) => -Errno::INVAL.raw_os_error(),
        (Ok(opened), false) => {
            // SAFETY: the caller's promise.
            unsafe { memory.write(opened) };
            0
        }
    }
}

/// `egm_memory_retired`: the number of spans, or a negative error number.
///
/// # Safety
/// `memory` is null, or was filled by `egm_memory_open` and not closed since; `spans` is null, or `most` spans can be
/// written there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_memory_retired(memory: *const CMemory, spans: *mut CSpan, most: usize) -> c_int {
    // SAFETY: the caller's promise.
    let memory = unsafe { memory.as_ref() };
    // SAFETY: `open` made it of a box, and `egm_memory_close` sets it to null.
    let opened = memory.and_then(|memory| unsafe { memory.handle.cast::<Opened>().as_ref() });
    let Some(opened) = opened else { return -Errno::INVAL.raw_os_error() };
    let retired = match opened.function.registers().and_then(|registers| registers.retired()) {
        Ok(retired) => retired,
        Err(error) => return -number(&error),
    };
    let room = if spans.is_null() { 0 } else { most };
    for (index, span) in retired.iter().take(room).enumerate() {
        let span = CSpan { offset: span.start, size: span.end - span.start };
        // SAFETY: the caller's promise; `index` is below `most`.
        unsafe { spans.wrapping_add(index).write(span) };
    }
    c_int::try_from(retired.len()).unwrap_or(c_int::MAX)
}

/// `egm_memory_close`.
///
/// # Safety
/// `memory` is null, or was filled by `egm_memory_open` and not closed since.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_memory_close(memory: *mut CMemory) {
    // SAFETY: the caller's promise.
    let Some(memory) = (unsafe { memory.as_mut() }) else { return };
    let handle = std::mem::replace(&mut memory.handle, ptr::null_mut()).cast::<Opened>();
    if !handle.is_null() {
        // SAFETY: `open` made it of a box, and it was taken out of the structure, so this is the only time.
        drop(unsafe { Box::from_raw(handle) });
    }
}

/// The function called `name`, or the first that is not broken; mapped.
fn open(found: &Found, name: Option<&CStr>) -> Result<CMemory, c_int> {
    let parsed = |name: &CStr| name.to_str().ok().and_then(|name| name.parse::<PciAddress>().ok());
    let wanted = name.map(|name| parsed(name).ok_or_else(|| Errno::INVAL.raw_os_error())).transpose()?;
    let is_wanted = |address: PciAddress| wanted.is_none_or(|wanted| wanted == address);
    let function = found.functions.iter().find(|function| is_wanted(function.address));
    let function = function.ok_or_else(|| {
        let broken = found.broken.iter().find(|(address, _)| is_wanted(*address));
        broken.map_or_else(|| Errno::NODEV.raw_os_error(), |(_, error)| number(error))
    })?;
    let memory = function.map().map_err(|error| number(&error))?;
    let opened = Box::new(Opened { function: function.clone(), memory });
    Ok(CMemory {
        address: opened.memory.address().as_ptr().cast(),
        size: opened.memory.size(),
        page: function.facts.page,
        pxm: function.facts.pxm.unwrap_or(u32::MAX),
        file: opened.memory.file().as_raw_fd(),
        handle: Box::into_raw(opened).cast(),
    })
}

fn number(error: &MemoryError) -> c_int {
    let source = match error {
        MemoryError::File { source, .. } => source.raw_os_error(),
        MemoryError::Form { .. } | MemoryError::Short { .. } | MemoryError::Silent { .. } => None,
    };
    source.unwrap_or(Errno::IO.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Facts;
    use crate::function::find_in;
    use crate::testing;

    const FACTS: Facts = Facts { size: 0x20_0000, base: 0, page: 0x1000, pxm: Some(4) };

    #[test]
    fn a_program_gets_address_size_page_domain_and_file_until_it_closes() {
        let root = tempfile::tempdir().unwrap();
        testing::function(root.path(), "0000:01:00.0", &FACTS, 0x80_0000_0000, 0x20_0000);
        let found = find_in(root.path()).unwrap();
        let mut memory = open(&found, Some(c"0000:01:00.0")).unwrap();
        assert_eq!((memory.size, memory.page, memory.pxm), (0x20_0000, 0x1000, 4));
        assert!(memory.file >= 0 && memory.address.addr().is_multiple_of(0x20_0000));
        for _ in 0..2 {
            // SAFETY: `open` filled it; to close it again does nothing.
            unsafe { egm_memory_close(&raw mut memory) };
            assert!(memory.handle.is_null());
        }
    }

    #[test]
    fn a_program_gets_as_many_retired_spans_as_it_has_room_for_and_their_number() {
        let root = tempfile::tempdir().unwrap();
        testing::function(root.path(), "0000:01:00.0", &FACTS, 0x80_0000_0000, 0x20_0000);
        let bar = testing::registers(&FACTS, &[(0x1000, 0x2000), (0x5000, 0x1000)]);
        std::fs::write(root.path().join("0000:01:00.0/resource0"), bar).unwrap();
        let mut memory = open(&find_in(root.path()).unwrap(), None).unwrap();
        let mut spans = [CSpan { offset: 0, size: 0 }; 3];
        let retired = |spans: *mut CSpan, most| {
            // SAFETY: `open` filled `memory`, and `spans` has `most` or more, or is null.
            unsafe { egm_memory_retired(&raw const memory, spans, most) }
        };
        assert_eq!(retired(ptr::null_mut(), 3), 2);
        assert_eq!((retired(spans.as_mut_ptr(), 1), spans[1].size), (2, 0));
        assert_eq!(retired(spans.as_mut_ptr(), 3), 2);
        let expected = [(0x1000, 0x2000), (0x5000, 0x1000), (0, 0)];
        assert_eq!(spans, expected.map(|(offset, size)| CSpan { offset, size }));
        // SAFETY: `open` filled it.
        unsafe { egm_memory_close(&raw mut memory) };
        // SAFETY: a closed memory has no handle.
        assert_eq!(unsafe { egm_memory_retired(&raw const memory, ptr::null_mut(), 0) }, -22, "EINVAL");
    }

    #[test]
    fn what_is_not_there_or_no_address_is_a_number() {
        let none = Found::default();
        assert_eq!(open(&none, None).unwrap_err(), 19, "ENODEV");
        assert_eq!(open(&none, Some(c"0000:01:00.0")).unwrap_err(), 19);
        assert_eq!(open(&none, Some(c"gpu")).unwrap_err(), 22, "EINVAL");
    }

    #[test]
    fn a_broken_function_is_an_error_where_it_is_named_or_the_only_one() {
        let root = tempfile::tempdir().unwrap();
        testing::function(root.path(), "0000:01:00.0", &FACTS, 0x80_0000_0000, 0x10_0000);
        let broken = find_in(root.path()).unwrap();
        assert_eq!(open(&broken, None).unwrap_err(), 5, "EIO");
        testing::function(root.path(), "0000:02:00.0", &FACTS, 0x80_0000_0000, 0x20_0000);
        let found = find_in(root.path()).unwrap();
        assert_eq!(open(&found, Some(c"0000:01:00.0")).unwrap_err(), 5);
        let mut memory = open(&found, None).unwrap();
        assert_eq!(memory.size, 0x20_0000);
        // SAFETY: `open` filled it.
        unsafe { egm_memory_close(&raw mut memory) };
    }
}
