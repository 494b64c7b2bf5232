/* Reads the arguments of all-reduces of torch.distributed: Python would take longer than a small tensor to exchange. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include "native_calls.h"

enum { ASYNC_OP, TIMEOUT, REDUCE_OP, IS_CPU, LAYOUT, IS_CONTIGUOUS, IS_NEG, DTYPE, NUMEL, DATA_PTR, NAMES };
static const char *const TEXTS[NAMES] = {"asyncOp",       "timeout", "reduceOp", "is_cpu", "layout",
                                         "is_contiguous", "is_neg",  "dtype",    "numel",  "data_ptr"};
static PyObject *names[NAMES];

typedef struct {
    PyObject_HEAD
    PyObject *options, *tensor, *parameter, *strided, *sum, *mean, *timeout, *profiling;
} SumReader;

static PyObject *attribute(PyObject *object, int name) { return PyObject_GetAttr(object, names[name]); }
static PyObject *call(PyObject *object, int name) { return PyObject_CallMethodObjArgs(object, names[name], NULL); }

/* Whether `value` is `wanted`; −1 with an exception. Drops `value`. */
static int is(PyObject *value, PyObject *wanted) {
    if (value == NULL) return -1;
    Py_DECREF(value);
    return value == wanted;
}

/* Whether `value` equals `wanted`; −1 with an exception. Drops `value`. */
static int equals(PyObject *value, PyObject *wanted) {
    if (value == NULL) return -1;
    int equal = PyObject_RichCompareBool(value, wanted, Py_EQ);
    Py_DECREF(value);
    return equal;
}

/* Whether compiled code may run the call: of a plain tensor on the CPU, waited for, unrecorded, with no time-out. */
static int is_plain(SumReader *self, PyObject *tensor, PyObject *options) {
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    int plain = type == self->tensor || type == self->parameter;
    if (plain == 1) plain = is(attribute(options, ASYNC_OP), Py_False);
    if (plain == 1) plain = is(attribute(tensor, IS_CPU), Py_True);
    if (plain == 1) plain = is(attribute(tensor, LAYOUT), self->strided);
    if (plain == 1) plain = is(call(tensor, IS_CONTIGUOUS), Py_True);
    if (plain == 1) plain = is(call(tensor, IS_NEG), Py_False);
    if (plain == 1) plain = is(PyObject_CallNoArgs(self->profiling), Py_False);
    if (plain == 1) plain = equals(attribute(options, TIMEOUT), self->timeout);
    return plain;
}

/* ((is a mean, dtype, elements), address), or None for another operation. */
static PyObject *describe(SumReader *self, PyObject *tensor, PyObject *options) {
    int sum = equals(attribute(options, REDUCE_OP), self->sum);
    int mean = sum == 0 ? equals(attribute(options, REDUCE_OP), self->mean) : 0;
    if (sum < 0 || mean < 0) return NULL;
    if (!sum && !mean) Py_RETURN_NONE;
    PyObject *found = NULL, *key = NULL;
    PyObject *dtype = attribute(tensor, DTYPE), *numel = call(tensor, NUMEL), *address = call(tensor, DATA_PTR);
    if (dtype != NULL && numel != NULL) key = PyTuple_Pack(3, mean ? Py_True : Py_False, dtype, numel);
    if (key != NULL && address != NULL) found = PyTuple_Pack(2, key, address);
    Py_XDECREF(key);
    Py_XDECREF(dtype);
    Py_XDECREF(numel);
    Py_XDECREF(address);
    return found;
}

static PyObject *reader_read(SumReader *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "%zd arguments instead of 2", count);
        return NULL;
    }
    PyObject *tensors = args[0], *options = args[1];
    if ((PyObject *)Py_TYPE(options) != self->options) Py_RETURN_NONE;
    if (!PyList_CheckExact(tensors) || PyList_Size(tensors) != 1) Py_RETURN_NONE;
    PyObject *tensor = Py_NewRef(PyList_GetItem(tensors, 0));
    int plain = is_plain(self, tensor, options);
    PyObject *found = plain < 0 ? NULL : plain ? describe(self, tensor, options) : Py_NewRef(Py_None);
    Py_DECREF(tensor);
    return found;
}

static PyMethodDef reader_methods[] = {
    {"read", (PyCFunction)(void (*)(void))reader_read, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *held[8];
    (void)kwargs;
    if (!PyArg_ParseTuple(
            args, "OOOOOOOO", held, held + 1, held + 2, held + 3, held + 4, held + 5, held + 6, held + 7))
        return NULL;
    SumReader *self = (SumReader *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    PyObject **places[] = {&self->options, &self->tensor, &self->parameter, &self->strided,
                           &self->sum,     &self->mean,   &self->timeout,   &self->profiling};
    for (int each = 0; each < 8; each++) *places[each] = Py_NewRef(held[each]);
    return (PyObject *)self;
}

static void reader_dealloc(SumReader *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->options);
    Py_XDECREF(self->tensor);
    Py_XDECREF(self->parameter);
    Py_XDECREF(self->strided);
    Py_XDECREF(self->sum);
    Py_XDECREF(self->mean);
    Py_XDECREF(self->timeout);
    Py_XDECREF(self->profiling);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot reader_slots[] = {
    {Py_tp_new, reader_new},
    {Py_tp_dealloc, reader_dealloc},
    {Py_tp_methods, reader_methods},
    {0, NULL},
};
static PyType_Spec reader_spec = {
    "paceline._core._native.SumReader", sizeof(SumReader), 0, Py_TPFLAGS_DEFAULT, reader_slots};

PyObject *make_sum_reader(void) {
    for (int name = 0; name < NAMES; name++)
        if (names[name] == NULL && (names[name] = PyUnicode_InternFromString(TEXTS[name])) == NULL) return NULL;
    return PyType_FromSpec(&reader_spec);
}
