//! The handler of SIGBUS. This is an unsafe module.
//!
//! Why it exists: the kernel reports bad memory by a signal, on the thread that touched it, within an instruction.
//! Callers may rely on this: the handler uses only atomics, `signal`, `raise` and rustix's bare `mmap` and `write`
//! (which leave errno alone), all async-signal-safe; an unexplained SIGBUS kills the process, as without the handler.
#![expect(unsafe_code, reason = "a signal handler reads what the kernel points to and maps over a bad page")]

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, compiler_fence};

use rustix::event::{EventfdFlags, eventfd};
use rustix::mm::{self, MapFlags, ProtFlags};

use super::ring::{Fault, Ring};
use crate::mapping::Mapping;

/// Faults that wait for their reader.
pub(super) static RING: Ring = Ring::new();
/// Counts up when [`RING`] has something new; exists from the installation of the handler on.
static WAKE: OnceLock<OwnedFd> = OnceLock::new();

/// State that the handler needs of the interrupted thread. Atomics, because a handler runs concurrently; relaxed,
/// because it runs on the same thread.
struct ThreadState {
    /// The vCPU is in the guest: a bad page is the guest's, and no instruction of ours waits for it.
    in_guest: AtomicBool,
    /// The last bad page that the guest touched, as [`Fault::word`]; 0 for none.
    guest_fault: AtomicU64,
    /// The bytes that this thread zeroes under guard: start and end.
    guarded: (AtomicUsize, AtomicUsize),
    /// Bytes in a page of that mapping.
    page: AtomicUsize,
    /// The first bad address in them, 0 for none.
    bad: AtomicUsize,
    /// log2 of its bytes, 0 for unknown.
    shift: AtomicUsize,
}

thread_local! {
    static THREAD: ThreadState = const {
        ThreadState {
            in_guest: AtomicBool::new(false),
            guest_fault: AtomicU64::new(0),
            guarded: (AtomicUsize::new(0), AtomicUsize::new(0)),
            page: AtomicUsize::new(0),
            bad: AtomicUsize::new(0),
            shift: AtomicUsize::new(0),
        }
    };
}

/// The head of `siginfo_t` as Linux lays it out for SIGBUS on 64-bit machines; libc has no `si_addr_lsb`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SignalInfo {
    signal: i32,
    errno: i32,
    code: i32,
    padding: i32,
    address: usize,
    shift: i16,
}

/// Meaning of a SIGBUS for the thread that gets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SigbusAction {
    /// A bad page that no code of this process waits for: reported, and the process goes on.
    Report { consumed: bool },
    /// A page under guard: memory takes its place, and the caller of [`guarded`] gets the address.
    Replace,
    /// The signal has no explanation: the process ends.
    Die,
}

/// `code` is `si_code`; `guarded` whether the address lies in the bytes that this thread guards.
const fn action(code: i32, guarded: bool, in_guest: bool) -> SigbusAction {
    match code {
        libc::BUS_MCEERR_AO => SigbusAction::Report { consumed: false },
        libc::BUS_MCEERR_AR | libc::BUS_ADRALN | libc::BUS_ADRERR | libc::BUS_OBJERR if guarded => {
            SigbusAction::Replace
        }
        libc::BUS_MCEERR_AR if in_guest => SigbusAction::Report { consumed: true },
        _ => SigbusAction::Die,
    }
}

/// Installs the handler, once; returns the descriptor that becomes readable with every reported fault.
pub(super) fn install() -> io::Result<&'static OwnedFd> {
    if let Some(wake) = WAKE.get() {
        return Ok(wake);
    }
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    // SAFETY: all zero bytes are a `sigaction` with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as extern "C" fn(_, _, _) as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the type that SA_SIGINFO requires and is async-signal-safe; the old one is not kept,
    // because its action for a SIGBUS of this process would be to die, which `SigbusAction::Die` does.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(WAKE.get_or_init(|| wake))
}

/// Runs `work`, which runs a guest: a bad page that the guest touches is reported and returned, and does not kill.
pub(super) fn in_guest<T>(work: impl FnOnce() -> T) -> (T, Option<Fault>) {
    /// Also after a panic.
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            THREAD.with(|thread| thread.in_guest.store(false, Ordering::Relaxed));
            compiler_fence(Ordering::SeqCst);
        }
    }
    let _leave = Leave;
    THREAD.with(|thread| thread.in_guest.store(true, Ordering::Relaxed));
    compiler_fence(Ordering::SeqCst);
    let result = work();
    compiler_fence(Ordering::SeqCst);
    (result, Fault::of_word(THREAD.with(|thread| thread.guest_fault.swap(0, Ordering::Relaxed))))
}

/// Runs `work`, which touches `mapping` only, with pages of `page` bytes. Without a fault: `None`. With one: the offset
/// of the first bad byte and how many are bad, both inside `mapping`, which is other memory from there on: its owner
/// must drop it.
pub(super) fn guarded(mapping: &Mapping, page: usize, work: impl FnOnce()) -> Option<(usize, usize)> {
    let start = mapping.as_ptr().addr();
    let (end, pages) = (start.saturating_add(mapping.size()), mapping.pages());
    let page = page.max(rustix::param::page_size());
    let lowest = if egm_address::fault!("guard-below-its-mapping") { 0 } else { pages.start };
    THREAD.with(|thread| {
        thread.bad.store(0, Ordering::Relaxed);
        thread.page.store(page, Ordering::Relaxed);
        thread.guarded.1.store(pages.end, Ordering::Relaxed);
        thread.guarded.0.store(lowest, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        work();
        compiler_fence(Ordering::SeqCst);
        thread.guarded.1.store(0, Ordering::Relaxed);
        let bad = thread.bad.load(Ordering::Relaxed);
        let shift = u32::try_from(thread.shift.load(Ordering::Relaxed)).unwrap_or(0);
        let size = if shift == 0 { page } else { 1usize.checked_shl(shift).unwrap_or(page) };
        let first = page_of(bad, size, start);
        let after = (bad & !size.wrapping_sub(1)).saturating_add(size).min(end);
        (bad != 0).then(|| (first.wrapping_sub(start), after.wrapping_sub(first)))
    })
}

/// First byte of the page of `size` bytes around `address`, but none before `start`: the page may reach further down
/// than the mapping, where other memory lies.
fn page_of(address: usize, size: usize, start: usize) -> usize {
    (address & !size.wrapping_sub(1)).max(start)
}

extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: SA_SIGINFO promises a siginfo_t of 128 bytes, of which `SignalInfo` describes the first.
    let info = unsafe { info.cast::<SignalInfo>().read() };
    THREAD.with(|thread| {
        let guarded = thread.guarded.0.load(Ordering::Relaxed)..thread.guarded.1.load(Ordering::Relaxed);
        let is_guarded = guarded.contains(&info.address);
        match action(info.code, is_guarded, thread.in_guest.load(Ordering::Relaxed)) {
            SigbusAction::Report { consumed } => report(thread, &info, consumed),
            SigbusAction::Replace if replace(thread, &info, &guarded) => {}
            SigbusAction::Replace | SigbusAction::Die => die(),
        }
    });
}

fn report(thread: &ThreadState, info: &SignalInfo, consumed: bool) {
    let fault = Fault::new(u64::try_from(info.address).unwrap_or(0), info.shift, consumed);
    if consumed {
        thread.guest_fault.store(fault.word(), Ordering::Relaxed);
    }
    RING.push(fault);
    if let Some(wake) = WAKE.get() {
        let _ = rustix::io::write(wake, &1u64.to_ne_bytes()); // a full one is readable anyway
    }
}

/// Replaces the bad page and the rest of the guarded range by new memory, and records the address.
fn replace(thread: &ThreadState, info: &SignalInfo, guarded: &Range<usize>) -> bool {
    let consumed = info.code == libc::BUS_MCEERR_AR;
    let start = page_of(info.address, thread.page.load(Ordering::Relaxed), guarded.start);
    if thread.bad.load(Ordering::Relaxed) == 0 {
        let shift = if consumed { usize::try_from(info.shift).unwrap_or(0) } else { 0 };
        thread.shift.store(shift, Ordering::Relaxed);
        thread.bad.store(info.address, Ordering::Relaxed);
    }
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    let at = std::ptr::without_provenance_mut(start);
    // SAFETY: the range lies in the mapping that this thread guards and owns: `page_of` gives no address below its
    // start, and `guarded.end` is its end.
    unsafe { mm::mmap_anonymous(at, guarded.end.wrapping_sub(start), access, flags | MapFlags::FIXED) }
        .is_ok()
}

/// The default action, whatever sent the signal: it is blocked here and delivered when the handler returns.
fn die() {
    // SAFETY: async-signal-safe, and without memory.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    // SAFETY: as above.
    unsafe { libc::raise(libc::SIGBUS) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing;
    use crate::backing::tests::{region, slice};
    use crate::region::RegionKind;

    #[test]
    fn only_what_is_explained_survives() {
        let report = |consumed| SigbusAction::Report { consumed };
        let table = [
            (libc::BUS_MCEERR_AO, false, false, report(false)),
            (libc::BUS_MCEERR_AR, false, false, SigbusAction::Die),
            (libc::BUS_MCEERR_AR, false, true, report(true)),
            (libc::BUS_MCEERR_AR, true, false, SigbusAction::Replace),
            (libc::BUS_ADRERR, false, false, SigbusAction::Die),
            (libc::BUS_ADRERR, false, true, SigbusAction::Die),
            (libc::BUS_ADRERR, true, false, SigbusAction::Replace),
            (libc::SI_USER, true, true, SigbusAction::Die),
            (libc::SI_KERNEL, true, true, SigbusAction::Die),
        ];
        for (code, guarded, in_guest, expected) in table {
            assert_eq!(action(code, guarded, in_guest), expected, "{code} {guarded} {in_guest}");
        }
    }

    #[test]
    fn the_layout_is_that_of_libc() {
        // SAFETY: all zero bytes are a siginfo_t.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: `SignalInfo` is shorter than siginfo_t and as aligned.
        let head = unsafe { &mut *(&raw mut info).cast::<SignalInfo>() };
        (head.code, head.address) = (libc::BUS_ADRERR, 0x1000);
        // SAFETY: it was filled as the kernel fills it.
        assert_eq!((info.si_code, unsafe { info.si_addr() }.addr()), (libc::BUS_ADRERR, 0x1000));
    }

    /// A page of the backing may begin below the mapping: the replacement must not.
    #[test]
    fn memory_below_the_guarded_mapping_is_untouched() {
        const SIZE: u64 = 4 << 20;
        let base = rustix::param::page_size();
        let (page, below) = (16 * base, 3 * base);
        let folder = tempfile::tempdir().unwrap();
        let file = std::fs::File::create_new(folder.path().join("memory")).unwrap();
        file.set_len(SIZE).unwrap();
        let region = region(RegionKind::Memfd, SIZE, 0x1000);
        let backing = backing::adopt(&region, &slice(0, SIZE), file.try_clone().unwrap()).unwrap();
        // Where the reservation starts decides how much of it lies below: another place has what this one lacks.
        let mapping = (0..8)
            .map(|n| Mapping::new(backing.as_ref(), 0, SIZE, (below + n * page).try_into().unwrap()).unwrap())
            .find(|mapping| mapping.reserved_below() >= below)
            .unwrap();
        let canary = mapping.as_ptr().wrapping_sub(below);
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: the mapping's own reservation reaches `below` bytes further down, and nothing uses it.
        unsafe { mm::mmap_anonymous(canary.cast(), below, access, flags) }.unwrap();
        // SAFETY: mapped above, and nothing refers to it.
        unsafe { canary.write_bytes(0x5a, below) };
        file.set_len(0).unwrap();
        install().unwrap();
        let bad = guarded(&mapping, page, || mapping.zero(2 * base, 8).unwrap());
        // SAFETY: as above.
        let canary = unsafe { std::slice::from_raw_parts(canary, below) };
        assert!(canary.iter().all(|byte| *byte == 0x5a), "the replacement reaches below the mapping");
        assert_eq!(bad, Some((0, page - below)));
    }
}
