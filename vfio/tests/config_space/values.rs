//! Values of registers, bit by bit: those that the guest finds first, and those that follow the device.

use crate::space::{add_extended, endpoint, put, read, read_u16, read_u32, shadow, with_standard};

const COMMAND: u16 = 0x04;
const EXPRESS: u8 = 0x10;
const AT: u16 = 0x60;

/// An endpoint with an express capability of version 2 at [`AT`], all ones behind its first register.
fn express() -> Vec<u8> {
    let mut body = [0xff; 0x3a];
    body[..2].copy_from_slice(&[0x02, 0]);
    with_standard(&[(0x60, EXPRESS, &body)])
}

/// PCIe 6.0 §7.5.1.1.3: nothing decodes and the function masters no bus before the guest requests it.
#[test]
fn the_command_register_begins_at_zero_whatever_the_device_has() {
    let mut device = endpoint(4096);
    put(&mut device, 4, &0x0547u16.to_le_bytes());
    assert_eq!(read_u16(&shadow(&device), &device, COMMAND), 0);
}

/// PCIe 6.0 §7.5.1.1.4: a list without a capability for the guest is none.
#[test]
fn the_status_register_has_a_list_only_where_the_guest_has_one() {
    const LIST: u16 = 1 << 4;
    let status = |capability: u8| {
        let device = with_standard(&[(0x60, capability, &[0x02, 0])]);
        read_u16(&shadow(&device), &device, 0x06) & LIST
    };
    let unknown = 0xee;
    assert_eq!((status(EXPRESS), status(unknown)), (LIST, 0));
}

/// PCIe 6.0 §7.5.3.3, §7.5.3.15: phantom functions, latency tolerance, processing hints, OBFF and alternative routing ids
/// are left out.
#[test]
fn capabilities_that_need_the_platform_are_left_out_bit_by_bit() {
    let device = express();
    let shadow = shadow(&device);
    assert_eq!(read_u32(&shadow, &device, AT + 0x04), 0xffff_ffe7);
    assert_eq!(read_u32(&shadow, &device, AT + 0x24), 0x00f3_c7df);
}

/// PCIe 6.0 §7.5.3.16: bits that depend on the ports of the host are zero.
#[test]
fn device_control_2_begins_with_the_bits_that_are_kept() {
    let device = express();
    assert_eq!(read_u16(&shadow(&device), &device, AT + 0x28), 0x13df);
}

/// PCIe 6.0 §7.5.3.8: a link that is trained again has another width.
#[test]
fn the_status_of_the_link_is_the_devices_at_each_read() {
    let mut device = express();
    let shadow = shadow(&device);
    for status in [0x1043_u16, 0x1021] {
        put(&mut device, usize::from(AT) + 0x12, &status.to_le_bytes());
        assert_eq!(read_u16(&shadow, &device, AT + 0x12), status);
    }
}

/// PCIe 6.0 §7.8.1.2: the row that is shown follows the register that selects it.
#[test]
fn a_row_of_the_power_budget_is_selected_on_the_device() {
    let mut device = with_standard(&[(0x60, EXPRESS, &[0x02, 0])]);
    add_extended(&mut device, &[(0x100, 0x04, &[0; 12])]);
    let mut shadow = shadow(&device);
    let written = shadow.write(0x104, &[5]);
    assert_eq!(
        written.forward.iter().map(|forward| (forward.offset, forward.data[0])).collect::<Vec<_>>(),
        [(0x104, 5)]
    );
    put(&mut device, 0x104, &[7]);
    assert_eq!(read(&shadow, &device, 0x104), [7], "as the device has it");
}
