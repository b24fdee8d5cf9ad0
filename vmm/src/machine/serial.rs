//! The serial ports, a 16550 on x86 and a PL011 on Arm, and the console behind them.

use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use vm_superio::serial::SerialEvents;
use vm_superio::{Serial, SerialState, Trigger};
use vmm_sys_util::eventfd::EventFd;

use super::board_state::{BoardState, SerialRegisters};
use super::bus::BusDevice;
use super::pl011::{Effect, Pl011};
use crate::console::Console;
use crate::eventfd;
use crate::kvm::WiredLine;
use crate::lock::lock;
use crate::snapshot::Mismatch;

/// Raises the serial line.
#[derive(Clone)]
pub(super) struct SerialLine(pub(super) Arc<EventFd>);

impl Trigger for SerialLine {
    type E = io::Error;
    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Notifies the event loop that the guest has taken all typed bytes.
#[derive(Clone)]
struct Drained(Arc<EventFd>);

impl SerialEvents for Drained {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}
    fn in_buffer_empty(&self) {
        let _ = self.0.write(1);
    }
}

type Uart = Serial<SerialLine, Drained, Output>;

/// Output of the port. A reader that is slow or gone costs output, but no time, because the port is locked.
#[derive(Clone)]
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
    line: SerialLine,
    output: Output,
    drained: Arc<EventFd>,
}

impl SerialPort {
    /// A port that raises `line` and writes to `console`.
    ///
    /// # Errors
    /// When an eventfd cannot be made.
    pub(super) fn new(line: SerialLine, console: Arc<Mutex<Console>>) -> io::Result<Arc<Self>> {
        let drained = Arc::new(eventfd::new()?);
        let output = Output(console);
        let uart = Mutex::new(uart(&line, &drained, &output));
        Ok(Arc::new(Self { uart, line, output, drained }))
    }
}

/// The registers of a port after a reset.
fn uart(line: &SerialLine, drained: &Arc<EventFd>, output: &Output) -> Uart {
    Serial::with_events(line.clone(), Drained(Arc::clone(drained)), output.clone())
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
    fn warm_reset(&self) {
        *lock(&self.uart) = uart(&self.line, &self.drained, &self.output);
        let _ = self.drained.write(1); // typed bytes that waited for room have some now
    }
    fn saved(&self) -> Option<BoardState> {
        let state = lock(&self.uart).state();
        Some(BoardState::Serial(SerialRegisters {
            divisor: u16::from_le_bytes([state.baud_divisor_low, state.baud_divisor_high]),
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            received: state.in_buffer,
        }))
    }
    fn restore(&self, saved: &BoardState) -> Result<(), Mismatch> {
        let BoardState::Serial(saved) = saved else { return Err(Mismatch::new("it is another device")) };
        let [baud_divisor_low, baud_divisor_high] = saved.divisor.to_le_bytes();
        let state = SerialState {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable: saved.interrupt_enable,
            interrupt_identification: saved.interrupt_identification,
            line_control: saved.line_control,
            line_status: saved.line_status,
            modem_control: saved.modem_control,
            modem_status: saved.modem_status,
            scratch: saved.scratch,
            in_buffer: saved.received.clone(),
        };
        let (drained, output) = (Drained(Arc::clone(&self.drained)), self.output.clone());
        let uart = Serial::from_state(&state, self.line.clone(), drained, output);
        *lock(&self.uart) = uart.map_err(|error| Mismatch::new(format!("no serial port: {error}")))?;
        Ok(())
    }
}

/// A PL011 as a device on the memory bus.
pub(super) struct ArmSerialPort {
    uart: Mutex<Pl011>,
    line: WiredLine,
    console: Arc<Mutex<Console>>,
    drained: Arc<EventFd>,
}

impl ArmSerialPort {
    /// A port that holds `line` as long as it interrupts, and writes to `console`.
    ///
    /// # Errors
    /// When an eventfd cannot be made.
    pub(super) fn new(line: WiredLine, console: Arc<Mutex<Console>>) -> io::Result<Arc<Self>> {
        let drained = Arc::new(eventfd::new()?);
        Ok(Arc::new(Self { uart: Mutex::default(), line, console, drained }))
    }

    /// Changes the registers, and then the line to match them. The lock covers both, since several threads do so.
    fn with<T>(&self, change: impl FnOnce(&mut Pl011) -> T) -> T {
        let mut uart = lock(&self.uart);
        let before = uart.interrupts();
        let result = change(&mut uart);
        if before != uart.interrupts() {
            let _ = self.line.set(!before); // the plan's number for it is one that the controller has
        }
        result
    }
}

impl BusDevice for ArmSerialPort {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let (value, effect) = self.with(|uart| uart.read(offset));
        data.fill(0);
        data.iter_mut().zip(value.to_le_bytes()).for_each(|(byte, value)| *byte = value);
        if effect == Effect::Drained {
            let _ = self.drained.write(1);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut value = [0; 4];
        value.iter_mut().zip(data).for_each(|(byte, written)| *byte = *written);
        if let Effect::Send(byte) = self.with(|uart| uart.write(offset, u32::from_le_bytes(value))) {
            lock(&self.console).write(&[byte]);
        }
    }

    fn warm_reset(&self) {
        self.with(|uart| *uart = Pl011::default());
        let _ = self.drained.write(1); // typed bytes that waited for room have some now
    }

    fn saved(&self) -> Option<BoardState> {
        Some(BoardState::Pl011(lock(&self.uart).saved()))
    }

    fn restore(&self, saved: &BoardState) -> Result<(), Mismatch> {
        let BoardState::Pl011(saved) = saved else { return Err(Mismatch::new("it is another device")) };
        let restored = Pl011::restored(saved)?;
        self.with(|uart| *uart = restored);
        Ok(())
    }
}

/// A port that takes typed bytes.
pub(super) trait Port: Send + Sync {
    /// Bytes that it takes now.
    fn room(&self) -> usize;
    /// Takes `data`, for which there is room.
    fn receive(&self, data: &[u8]);
    /// Signalled when the guest has taken all bytes.
    fn drained(&self) -> &EventFd;
}

impl Port for SerialPort {
    fn room(&self) -> usize {
        lock(&self.uart).fifo_capacity()
    }

    fn receive(&self, data: &[u8]) {
        let _ = lock(&self.uart).enqueue_raw_bytes(data); // callers pass at most `room` bytes
    }

    fn drained(&self) -> &EventFd {
        &self.drained
    }
}

impl Port for ArmSerialPort {
    fn room(&self) -> usize {
        lock(&self.uart).room()
    }

    fn receive(&self, data: &[u8]) {
        self.with(|uart| uart.receive(data));
    }

    fn drained(&self) -> &EventFd {
        &self.drained
    }
}

/// Carries typed bytes from the console to the port. While the guest does not read, nothing is taken from the
/// console: the terminal's own flow control holds the typist, and no loop spins.
pub(super) struct ConsoleInput {
    port: Arc<dyn Port>,
    console: Arc<Mutex<Console>>,
    waiting_for: Vec<RawFd>,
}

impl ConsoleInput {
    /// From `console` to `port`.
    pub(super) fn new(port: Arc<dyn Port>, console: Arc<Mutex<Console>>) -> Self {
        Self { port, console, waiting_for: Vec::new() }
    }

    /// Stops waiting for the console, which may then close its descriptors.
    fn wait_for_nothing(&mut self, ops: &mut EventOps<'_>) {
        for fd in self.waiting_for.drain(..) {
            let _ = ops.remove(Events::empty_raw(fd));
        }
    }

    /// Waits for the console's current descriptors. A source that cannot be waited for, a regular file, gives no input.
    fn wait(&mut self, ops: &mut EventOps<'_>) {
        self.waiting_for = lock(&self.console).sources();
        for fd in &self.waiting_for {
            let _ = ops.add(Events::new_raw(*fd, EventSet::IN));
        }
    }
}

impl MutEventSubscriber for ConsoleInput {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        self.wait_for_nothing(ops);
        let mut buffer = [0u8; 64];
        if events.fd() == self.port.drained().as_raw_fd() {
            let _ = self.port.drained().read();
        } else if let Some(room @ [_, ..]) = buffer.get_mut(..self.port.room()) {
            // A guest in loopback mode fills the port itself, so that there may be no room.
            let count = lock(&self.console).read(room);
            self.port.receive(room.get(..count).unwrap_or_default());
        }
        if self.port.room() > 0 {
            self.wait(ops);
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        lock(&self.console).take_terminal(); // signals are caught by now, so it is restored
        let _ = ops.add(Events::new(self.port.drained(), EventSet::IN));
        self.wait(ops);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::path::Path;

    use event_manager::{EventManager, SubscriberOps};
    use tempfile::TempDir;

    use super::*;
    use crate::config;

    const DATA: u64 = 0;
    const MODEM_CONTROL: u64 = 4;
    const LINE_STATUS: u64 = 5;
    const LOOPBACK: u8 = 1 << 4;
    const FIFO: usize = 64;

    /// A port, the event loop in front of it and a console socket behind.
    struct Wired {
        port: Arc<SerialPort>,
        events: EventManager<ConsoleInput>,
        folder: TempDir,
    }

    impl Wired {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let socket = config::Console::Socket { path: folder.path().join("console") };
            let console = Arc::new(Mutex::new(Console::open(&socket).unwrap()));
            let line = SerialLine(Arc::new(eventfd::new().unwrap()));
            let port = SerialPort::new(line, Arc::clone(&console)).unwrap();
            let mut events = EventManager::new().unwrap();
            events.add_subscriber(ConsoleInput::new(Arc::clone(&port) as Arc<dyn Port>, console));
            Self { port, events, folder }
        }

        /// Everything that waits for the loop.
        fn turn(&mut self) {
            while self.events.run_with_timeout(0).unwrap() > 0 {}
        }

        fn client(&mut self) -> UnixStream {
            let path: &Path = self.folder.path();
            let client = UnixStream::connect(path.join("console")).unwrap();
            client.set_nonblocking(true).unwrap();
            self.turn();
            client
        }

        fn guest_read(&self, register: u64) -> u8 {
            let mut data = [0];
            self.port.read(register, &mut data);
            data[0]
        }

        fn guest_write(&self, register: u64, value: u8) {
            self.port.write(register, &[value]);
        }

        /// A byte each way.
        #[track_caller]
        fn carries_both_ways(&mut self, client: &mut UnixStream, byte: u8) {
            client.write_all(&[byte]).unwrap();
            self.turn();
            assert_eq!((self.guest_read(LINE_STATUS) & 1, self.guest_read(DATA)), (1, byte));
            self.turn();
            self.guest_write(DATA, byte);
            let mut received = [0];
            client.read_exact(&mut received).unwrap();
            assert_eq!(received, [byte]);
        }
    }

    #[test]
    fn one_client_after_another_types_and_reads() {
        let mut wired = Wired::new();
        for byte in *b"abc" {
            let mut client = wired.client();
            wired.carries_both_ways(&mut client, byte);
            drop(client);
            wired.turn();
        }
    }

    #[test]
    fn a_client_that_has_left_makes_room_for_the_next() {
        let mut wired = Wired::new();
        for byte in *b"abc" {
            let mut client = wired.client();
            wired.carries_both_ways(&mut client, byte);
            drop(client);
            wired.guest_write(DATA, byte); // before the loop has seen that the client is gone
            wired.turn();
        }
    }

    #[test]
    fn what_is_typed_waits_while_a_guest_has_filled_the_port_by_itself() {
        let mut wired = Wired::new();
        let mut client = wired.client();
        wired.guest_write(MODEM_CONTROL, LOOPBACK);
        for _ in 0..FIFO {
            wired.guest_write(DATA, b'x');
        }
        wired.guest_write(MODEM_CONTROL, 0);
        client.write_all(b"typed").unwrap();
        wired.turn();
        for _ in 0..FIFO {
            assert_eq!(wired.guest_read(DATA), b'x');
        }
        wired.turn();
        let typed = [(); 5].map(|()| wired.guest_read(DATA));
        assert_eq!(&typed, b"typed");
        wired.turn();
        wired.carries_both_ways(&mut client, b'!');
    }
}
