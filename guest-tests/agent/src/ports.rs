//! I/O ports, which only x86 has: the agent's one module that depends on an architecture.

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::Ports;

/// Leave to use ports that there are none of: no value has this type.
#[cfg(not(target_arch = "x86_64"))]
#[derive(Debug)]
pub(crate) enum Ports {}

#[cfg(not(target_arch = "x86_64"))]
impl Ports {
    pub(crate) fn open() -> Option<Self> {
        None
    }

    pub(crate) fn exchange(&self, _port: u16, _width: usize, _value: u32) {}
}
