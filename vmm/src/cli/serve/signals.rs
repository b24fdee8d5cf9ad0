//! Signals to a program that serves machines: none is lost between one machine and the next.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{SigSet, Signal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::flag;
use signal_hook::low_level::pipe;
use vmm_sys_util::eventfd::EventFd;

use crate::eventfd::borrowed;

/// Signals that end the program.
const END: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

/// Handlers of the signals that end the program. A machine that runs has handlers of its own beside them.
pub(super) struct Signals {
    /// Whether they end the process at once, as they do while a machine of `egm-vmm run` starts.
    is_starting: Arc<AtomicBool>,
    /// Readable after one of them.
    received: UnixStream,
}

impl Signals {
    /// Handles them from now on, those as well that the execution before this one left to the kernel.
    pub(super) fn new() -> io::Result<Self> {
        let is_starting = Arc::<AtomicBool>::default();
        let (received, sent) = UnixStream::pair()?;
        received.set_nonblocking(true)?;
        for signal in END {
            flag::register_conditional_default(signal as i32, Arc::clone(&is_starting))?;
            pipe::register(signal as i32, sent.try_clone()?)?;
        }
        // The power button of no guest does nothing; an unhandled signal would end this process.
        flag::register(libc::SIGPWR, Arc::default())?;
        set().thread_unblock()?;
        Ok(Self { is_starting, received })
    }

    /// Whether a machine starts.
    pub(super) fn set_starting(&self, is_starting: bool) {
        self.is_starting.store(is_starting, Ordering::SeqCst);
    }

    /// Waits for a signal or for `orders`.
    pub(super) fn wait_with(&self, orders: Option<&EventFd>) -> io::Result<()> {
        let mut ready = vec![PollFd::new(&self.received, PollFlags::IN)];
        ready.extend(orders.map(|orders| PollFd::from_borrowed_fd(borrowed(orders), PollFlags::IN)));
        match poll(&mut ready, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Whether one of them came since the last call.
    pub(super) fn is_end_requested(&mut self) -> bool {
        self.received.read(&mut [0; 64]).is_ok_and(|count| count > 0)
    }

    /// Whether one waits for [`is_end_requested`](Self::is_end_requested).
    pub(super) fn is_received(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.received, PollFlags::IN)], Some(&now)).is_ok_and(|count| count > 0)
    }

    /// Ends [`block`](Self::block), where no execution followed.
    pub(super) fn unblock(&self) -> io::Result<()> {
        Ok(set().thread_unblock()?)
    }

    /// From now on they wait in the kernel, over an execution of this program too.
    pub(super) fn block(&self) -> io::Result<()> {
        Ok(set().thread_block()?)
    }
}

/// Those that end the program, and the power button: an execution begins without a handler of it.
fn set() -> SigSet {
    END.into_iter().chain([Signal::SIGPWR]).collect()
}
