//! The `egm-device` program; all its code is in the library.

fn main() -> std::process::ExitCode {
    egm_vfio_wire::receiver::attend().unwrap_or_else(egm_device::main)
}
