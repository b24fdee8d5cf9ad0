//! The `egm-device` program; everything is in the library.

fn main() -> std::process::ExitCode {
    egm_device::cli::main()
}
