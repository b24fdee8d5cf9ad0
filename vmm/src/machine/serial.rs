//! The 16550 serial port and the console behind it.

use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use vm_superio::serial::SerialEvents;
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::bus::BusDevice;
use crate::console::Console;
use crate::lock::lock;

/// Raises the serial line.
pub(super) struct Line(pub(super) EventFd);

impl Trigger for Line {
    type E = io::Error;
    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Tells the event loop that the guest has taken what was typed.
struct Drained(Arc<EventFd>);

impl SerialEvents for Drained {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}
    fn in_buffer_empty(&self) {
        let _ = self.0.write(1);
    }
}

type Uart = Serial<Line, Drained, Output>;

/// What the port writes to. A reader who is slow or gone costs output, never the guest's time or an error.
struct Output(Arc<Mutex<Console>>);

impl Write for Output {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        lock(&self.0).write(data);
        Ok(data.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The serial port as a device on the port bus.
pub(super) struct SerialPort {
    uart: Mutex<Uart>,
    drained: Arc<EventFd>,
}

/// Number of ports.
pub(super) const SERIAL_PORTS: u16 = 8;

impl SerialPort {
    /// A port that raises `line` and writes to `console`.
    ///
    /// # Errors
    /// When an eventfd cannot be made.
    pub(super) fn new(line: Line, console: Arc<Mutex<Console>>) -> io::Result<Arc<Self>> {
        let drained = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        let uart = Serial::with_events(line, Drained(Arc::clone(&drained)), Output(console));
        Ok(Arc::new(Self { uart: Mutex::new(uart), drained }))
    }

    /// Bytes that the receive buffer takes now.
    fn room(&self) -> usize {
        lock(&self.uart).fifo_capacity()
    }

    fn receive(&self, data: &[u8]) {
        let _ = lock(&self.uart).enqueue_raw_bytes(data); // what does not fit was not asked for: see `room`
    }
}

impl BusDevice for SerialPort {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let ([byte], Ok(register)) = (data, u8::try_from(offset)) {
            *byte = lock(&self.uart).read(register);
        }
    }
    fn write(&self, offset: u64, data: &[u8]) {
        if let ([byte], Ok(register)) = (data, u8::try_from(offset)) {
            let _ = lock(&self.uart).write(register, *byte);
        }
    }
}

/// Carries what is typed from the console to the port. While the guest does not read, nothing is taken from the
/// console: the terminal's own flow control holds the typist, and no loop spins.
pub(super) struct ConsoleInput {
    port: Arc<SerialPort>,
    console: Arc<Mutex<Console>>,
    waiting_for: Vec<RawFd>,
}

impl ConsoleInput {
    /// From `console` to `port`.
    pub(super) fn new(port: Arc<SerialPort>, console: Arc<Mutex<Console>>) -> Self {
        Self { port, console, waiting_for: Vec::new() }
    }

    /// Waits for `wanted` and nothing else. A source that cannot be waited for, a regular file, gives no input.
    fn wait_for(&mut self, wanted: Vec<RawFd>, ops: &mut EventOps<'_>) {
        for gone in self.waiting_for.iter().filter(|fd| !wanted.contains(fd)) {
            let _ = ops.remove(Events::empty_raw(*gone));
        }
        for new in wanted.iter().filter(|fd| !self.waiting_for.contains(fd)) {
            let _ = ops.add(Events::new_raw(*new, EventSet::IN));
        }
        self.waiting_for = wanted;
    }
}

impl MutEventSubscriber for ConsoleInput {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let mut buffer = [0u8; 64];
        let mut count = 0;
        if events.fd() == self.port.drained.as_raw_fd() {
            let _ = self.port.drained.read();
        } else {
            let room = self.port.room().min(buffer.len());
            count = lock(&self.console).read(buffer.get_mut(..room).unwrap_or_default());
        }
        if let Some(data) = buffer.get(..count).filter(|data| !data.is_empty()) {
            self.port.receive(data);
        }
        let wanted = if self.port.room() > 0 { lock(&self.console).sources() } else { Vec::new() };
        self.wait_for(wanted, ops);
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        lock(&self.console).take_terminal(); // signals are caught by now, so that it is given back
        let _ = ops.add(Events::new(self.port.drained.as_ref(), EventSet::IN));
        let sources = lock(&self.console).sources();
        self.wait_for(sources, ops);
    }
}
